"""How numbers are held and multiplied: types of weights, gradients and optimizer state (`types`), matrix products (`gemm`), products of 8-bit floats
(`fp8`, by the blocks of `recipes`, on the codes of `quantise`), the loss scale of fp16 (`scaling`)."""
