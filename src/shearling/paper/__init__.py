"""Method `paper`: Fisher search, rearrangement, mask tuning (Kwon et al., NeurIPS 2022); see docs/method.md."""
