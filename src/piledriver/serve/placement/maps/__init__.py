"""Device maps: sizes of modules, room of a batch, places by bytes or by predicted time."""
