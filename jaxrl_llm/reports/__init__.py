"""What a run says about itself: metrics, the live line, the page."""
