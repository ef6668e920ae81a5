"""The calibration examples, and the batches that are cut from them."""
