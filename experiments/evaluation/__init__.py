"""Evaluation of trained features.

`build_outputs` of `training/step.py` computes them, without augmentation and with running means and
variances.
"""
