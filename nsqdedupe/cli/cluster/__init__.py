"""The programs of the demo cluster, in containers (docker/) or as plain processes (`nsqdedupe demo-cluster`)."""
