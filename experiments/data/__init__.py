"""Data sets, sampling and augmentation."""
