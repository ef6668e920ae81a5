"""The calibration examples and their batches.

batch.py    some examples, padded to one length
sample.py   all examples, stored without padding; builds batches
read.py     DataLoaders, batches and rows -> a sample
"""
