"""The record of a run, and everything that is made from it: text, HTML, charts."""
