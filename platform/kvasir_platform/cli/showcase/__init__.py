"""`kvasir sim showcase`: seven experiments on one page."""
