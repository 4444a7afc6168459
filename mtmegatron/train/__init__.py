"""Training: the step (`engine`), the loop, metrics, and what guards them."""
