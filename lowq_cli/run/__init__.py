"""One quantize run: recipe -> plan -> tensors, one after the other -> a folder that is whole or not there."""
