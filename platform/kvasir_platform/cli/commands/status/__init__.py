"""`kvasir status`: whether all is well, what is wrong and what to do, and what runs."""
