"""Jobs that are content with a part of a GPU, side by side in processes of their own."""
