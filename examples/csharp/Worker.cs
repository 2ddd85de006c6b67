// A worker in C#, which prints each version of the model "line". It runs with Mono and with .NET:
//
//     mcs -out:worker.exe Worker.cs && mono worker.exe tcp://HOST:PORT [SECONDS]
//
// It calls libweightbus, which `make -C c_client install` installs; weightbus.h is the reference. Keep
// a delegate for `on_event` or `apply` in a static field as long as the worker exists.

using System;
using System.Runtime.InteropServices;

[StructLayout(LayoutKind.Sequential)]
struct Tensor {
  public IntPtr Name; public UIntPtr NameBytes; public IntPtr Dtype, Shape; public UIntPtr Rank;
  public IntPtr Data; public UIntPtr NBytes;
}

[StructLayout(LayoutKind.Sequential)]
struct Wanted { public IntPtr Id, Model; }

[StructLayout(LayoutKind.Sequential)]
struct Options {
  public UIntPtr Size;
  public IntPtr Address, Name;
  public IntPtr Wanted; public UIntPtr WantedCount;
  public ulong BytesMax; public byte NetworkOnly;
  public IntPtr OnEvent, User, Apply, BeforeApply; public uint ApplyTimeoutMs;
  public byte Partial, Cast;
  public IntPtr Client, Keys;
}

[StructLayout(LayoutKind.Sequential, CharSet = CharSet.Ansi)]
struct Update {
  public ulong Epoch, Version, NBytes, Nanoseconds;
  public IntPtr Snapshot;
  [MarshalAs(UnmanagedType.ByValTStr, SizeConst = 129)] public string Model;
  [MarshalAs(UnmanagedType.ByValTStr, SizeConst = 65)] public string Digest;
  [MarshalAs(UnmanagedType.ByValTStr, SizeConst = 129)] public string Code;
}

static class Worker {
  const string Library = "libweightbus.so.1";
  const int Ok = 0, Nothing = 1;

  [DllImport(Library)] static extern IntPtr wb_error();
  [DllImport(Library)] static extern int wb_model_resident(
      [In, Out] Tensor[] tensors, UIntPtr count, out IntPtr model);
  [DllImport(Library)] static extern void wb_model_free(IntPtr model);
  [DllImport(Library)] static extern int wb_read(
      IntPtr model, out IntPtr reading, out ulong epoch, out ulong version);
  [DllImport(Library)] static extern void wb_read_end(IntPtr reading);
  [DllImport(Library)] static extern int wb_connect(ref Options options, out IntPtr worker);
  [DllImport(Library)] static extern int wb_receive(IntPtr worker, uint ms, out Update update);
  [DllImport(Library)] static extern void wb_worker_free(IntPtr worker);

  static IntPtr Text(string text) { return Marshal.StringToHGlobalAnsi(text); } // never freed

  static string Why() { return Marshal.PtrToStringAnsi(wb_error()); }

  static void Check(int code) { if (code != Ok) throw new InvalidOperationException(Why()); }

  static int Main(string[] words) {
    var shape = Marshal.AllocHGlobal(8);
    Marshal.WriteInt64(shape, 3);
    var tensors = new[] { // the library owns the memory, and only the library writes to it
      new Tensor { Name = Text("slope"), Dtype = Text("F32"), Shape = shape, Rank = (UIntPtr)1 },
      new Tensor { Name = Text("offset"), Dtype = Text("F32") },
    };
    IntPtr model, worker;
    Check(wb_model_resident(tensors, (UIntPtr)2, out model));

    var wanted = Marshal.AllocHGlobal(Marshal.SizeOf(typeof(Wanted)));
    Marshal.StructureToPtr(new Wanted { Id = Text("line"), Model = model }, wanted, false);
    var options = new Options { Size = (UIntPtr)Marshal.SizeOf(typeof(Options)),
      Address = Text(words[0]), Wanted = wanted, WantedCount = (UIntPtr)1,
      Client = Text("csharp/" + Environment.Version) };
    Check(wb_connect(ref options, out worker));

    var patience = 1000 * (words.Length > 1 ? uint.Parse(words[1]) : 30);
    var line = new float[4];
    Update update;
    for (int code; (code = wb_receive(worker, patience, out update)) != Nothing;) {
      IntPtr reading;
      ulong epoch, version;
      if (code != Ok) {
        Console.Error.WriteLine(Why()); // the old version still runs
      } else if (wb_read(model, out reading, out epoch, out version) == Ok) { // one version until wb_read_end
        Marshal.Copy(tensors[0].Data, line, 0, 3);
        Marshal.Copy(tensors[1].Data, line, 3, 1);
        wb_read_end(reading);
        Console.WriteLine(FormattableString.Invariant(
            $"version {version}: {line[0]} {line[1]} {line[2]}, {line[3]}"));
      }
    }
    wb_worker_free(worker);
    wb_model_free(model);
    return 0;
  }
}
