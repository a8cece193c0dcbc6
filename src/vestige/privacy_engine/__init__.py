"""Private training in a loop of the user's own: `PrivacyEngine`."""
