"""What differs between the engines that we know."""
