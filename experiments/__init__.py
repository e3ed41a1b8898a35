"""The papers' experiments: data, models, training, evaluation and reports around `jaxloss`."""

import os

# XLA's factorisations on the CPU (the spectral sum's singular values) run on OpenBLAS, whose
# threads wait actively for one another: on two busy cores a 256×100 matrix took 24 ms instead of 2.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
