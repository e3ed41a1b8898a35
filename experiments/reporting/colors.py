"""Okabe and Ito's colours, which differ for colour-blind eyes and in grey."""

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"

INK = "#333333"
"""Captions and marks, which are nobody's colour."""
