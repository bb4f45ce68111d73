"""One quantize run: recipe -> plan -> tensors, one after another -> an output folder that is either complete or absent."""
