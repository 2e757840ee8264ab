"""The web console of operators: its files, and its pages of data, which all viewers share."""
