"""What no kernel takes: TVM's lowering, scheduled by fixed rules or by a record."""
