"""Optimizers on flat shards, learning-rate schedules, clipping."""
