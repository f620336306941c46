"""The cost of one block, the embedding, the output layer and the loss: operators, bytes, activations that are kept."""
