"""Programs that measure; README.md says what their numbers mean. Nothing in the package or its tests needs them."""
