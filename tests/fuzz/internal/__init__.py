"""Messages between routers and workers, damaged, forged, cut and out of order."""
