// Package weightbus receives a model's weights from a trainer, version by version, and applies
// them in place: whole, verified and acknowledged. It speaks WBP/1 (docs/PROTOCOL.md) over ZMTP 3 by
// itself, and encrypted where there are Keys.
//
//	w := make([]float32, 12)
//	worker, err := weightbus.Dial(ctx, "tcp://localhost:5555", weightbus.Options{
//		Models: map[string]weightbus.Tensors{"policy": {"w": weightbus.F32(w, 4, 3)}},
//	})
//	...
//	update, err := worker.Receive(ctx) // w now holds update.Version
//
// Versions are received in the background at all times, and applied where Receive is called.
// Other goroutines read the weights inside Worker.Read, and never see half a version.
package weightbus
