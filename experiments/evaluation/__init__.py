"""Evaluation of trained features.

`build_outputs` of `training/step.py` computes them: they are made of images as in a training step.
"""
