"""What a model folder says about itself, read without the libraries that load the model.

The command line, the gateway and workers judge a model by these values, before an engine spends a minute on
it.
"""
