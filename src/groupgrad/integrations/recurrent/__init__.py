"""Models with recurrent layers: linear attention, state-space layers, convolutions."""
