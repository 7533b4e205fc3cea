"""perfdoctor finds the lines that make a PyTorch training loop slow, and what would come back without them."""
