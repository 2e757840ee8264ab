"""What models make of images, videos and audio, from their files."""
