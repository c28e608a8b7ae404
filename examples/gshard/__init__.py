"""`sbp train`: a GShard mixture-of-experts Transformer that learns to translate."""
