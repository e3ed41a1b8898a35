"""Many runs: a grid of options, and linear evaluation."""
