"""What is known of hardware without having it: the catalogue of GPUs."""
