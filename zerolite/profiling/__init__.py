"""What a real run says of itself: times on the device, collectives, FLOPs."""
