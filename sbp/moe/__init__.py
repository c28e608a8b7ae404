"""The GShard mixture-of-experts Transformer and its training program, a user of sbp's public
names."""
