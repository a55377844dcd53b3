"""Published methods, one configuration file each."""
