"""`lowq tune` and `lowq bench` without their printing."""
