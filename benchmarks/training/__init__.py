"""Epochs of training, from files to a trained model."""
