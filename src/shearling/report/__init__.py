"""The record of a run, and its renderings: text, HTML, charts."""
