"""What leaves the house: exports, the endpoint, predictions for many images, drift, the check of an export."""
