"""What happened: recordings and how they are read. Nothing in here imports torch, so a trace is analysed anywhere."""
