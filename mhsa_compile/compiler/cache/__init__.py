"""What was compiled before: artifacts in the user's cache folder, each under a name that says all its bytes hang on."""
