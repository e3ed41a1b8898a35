"""Evaluation of trained features, which `build_outputs` of `training/step.py` computes."""
