"""Evaluation of trained features."""
