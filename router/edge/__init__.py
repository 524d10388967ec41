"""The daemon's HTTP/1.1 front: clients on one side, a router on the other."""
