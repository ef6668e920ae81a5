"""The calibration examples, and the batches that are cut from them.

batch.py    some examples, padded to one length
sample.py   all of them, without padding; cuts batches
read.py     DataLoaders, batches and rows -> a sample
"""
