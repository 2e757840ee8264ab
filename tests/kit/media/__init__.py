"""Files of images, videos and audio, and clients that send them."""
