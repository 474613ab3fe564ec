"""A cache of what a network says about masked windows: `build` makes it, `reader.LogitCache` reads it."""
