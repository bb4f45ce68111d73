"""The measurements of `lowq tune` and `lowq bench`, without their output."""
