"""How numbers are held and multiplied: types of weights, gradients and optimizer state (`types`), matrix products (`gemm`)."""
