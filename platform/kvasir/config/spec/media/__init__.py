"""What requests may have besides text: images, videos and audio."""
