"""The papers' experiments: data, models, training, evaluation and reports around `jaxloss`."""
