"""Pictures of a feature space: arrays in, figures and one page out."""
