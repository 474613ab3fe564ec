"""A cache of what a network says of masked windows: `build` makes it, `reader.LogitCache` reads it."""
